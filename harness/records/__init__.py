"""What is kept of a measurement: the schema, the JSONL file, the machine."""
