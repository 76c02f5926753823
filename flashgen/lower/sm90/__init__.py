"""Passes of the sm90 family; flashgen/lower/__init__.py has their order.

Roles are split on the dataflow graph of the selected statements; every wait, arrival and barrier is put in by a pass.
"""
