"""Every change to an engine's objects, as entries of a ledger (see `ledger`)."""
