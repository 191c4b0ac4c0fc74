"""How the replicas of a stage and the stages of a run agree on steps. Pure: no clock, no socket."""
