"""The dashboard's faces: renderings of `swarm.monitoring.health.SwarmHealth`, and what puts them up."""
