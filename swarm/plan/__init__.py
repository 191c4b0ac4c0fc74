"""Where to put whom: which device serves which stage. Pure: no clock, and chance comes from a seed."""
