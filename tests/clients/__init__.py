"""Real trainers: transformers, accelerate, Lightning, PEFT."""
