"""What `langevin check` tries: subjects (what is under test) and properties (what must hold)."""
