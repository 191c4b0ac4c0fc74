"""The programs: everything that touches the clock, sockets, disk, devices, processes and logs.

`docs/architecture.md` says what is in each folder and module.
"""
