"""How the embedded model `shapes` is made and judged: scenes, the judge, both trainings, the evaluation."""
