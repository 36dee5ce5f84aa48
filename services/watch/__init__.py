"""What a person sees of a run: the picture, the live view, the summary, the plots."""
