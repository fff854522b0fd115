"""Scripts as other projects' users write them: none of them knows of Shoal."""
