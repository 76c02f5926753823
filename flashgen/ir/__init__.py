"""The intermediate representation: expressions, statements, their printer, verifier and dataflow graph."""
