"""Device meshes and shardings, the only room that names mesh axes."""
