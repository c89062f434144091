"""What other people's trainers need around `FusedSAM`: a file for each library, which it imports in the functions that
need it."""
