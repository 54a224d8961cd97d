"""Scores -> statistics, tables, figures, pages; what others published; the evidence on which a champion is chosen."""
