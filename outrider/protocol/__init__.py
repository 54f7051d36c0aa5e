"""What Outrider's services say to each other, as plain values, and its translation to protobuf."""
