"""Settings: what there is (`settings`), what each accepts (`kinds`, `tables`), where it comes from (`sources`).

And the `machine`: its CPU, and the RAM that some defaults are a share of.
"""
