"""Scheduling of Programs: pure decisions over a snapshot. Nothing here reads a clock, does I/O or knows Redis.

`facts` holds what a snapshot shows; every other module answers one question about it.
"""
