"""Every change to an engine's own objects, as entries of a ledger (see `ledger`)."""
