"""Connections of peers that can dial one another: sealed TCP, with fewer copies of each byte than by p2pd."""
