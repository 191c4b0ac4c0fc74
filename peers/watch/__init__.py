"""The dashboard's faces: renderings of `swarm.policy.health.SwarmHealth`, and what puts them up."""
