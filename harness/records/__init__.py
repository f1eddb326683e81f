"""Records of measurements: their schema, the JSONL file, the machine they were made on."""
