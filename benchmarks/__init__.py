"""Benchmarks of te_jax against its peers.

A family is a module here with a `FAMILY`; `te-jax bench` lists and runs them. Beside the families there are

- shapes: the shapes of real models, shared by every family
- elementwise: what families share that are as fast as memory
- flax_fp8: the FP8 products that Flax has
- harness: checks and times an operation's implementations; the record of the environment, the result files
- torch_peer: what families share that compare with torch
- tables: turns result files into the tables and figures of README.md and docs/
"""
