"""flashgen inside other libraries."""
