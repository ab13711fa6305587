"""What hardware, draft length and configuration a load needs: profiles, simulation, capacity, deployment plans."""
