"""Statistics, tables, figures and pages of scores; published results; the evidence for choosing a champion."""
