"""Collective products on canonical shapes, and their derivatives."""
