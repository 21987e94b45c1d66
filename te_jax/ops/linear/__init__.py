"""Linear layers: one derivative rule (`rule`), over products on one device (`local`), of groups of rows (`grouped`) and
across devices (`te_jax.parallel`); and a second one for gated MLPs of any of them (`gated`)."""
