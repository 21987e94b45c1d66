"""How the devices of a collective product exchange what they multiply: plain collectives, a ring, or peer copies."""
