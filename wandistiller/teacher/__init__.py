"""The frozen teacher and where its weights live (placements)."""
