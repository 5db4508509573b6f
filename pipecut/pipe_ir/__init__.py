"""What a cut model is: traces, specs, edges and the Pipe."""
