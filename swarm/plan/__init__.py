"""Which device serves which stage. Pure: no clock, and chance comes from a seed."""
