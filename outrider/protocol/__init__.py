"""Messages between Outrider's services as plain values, and their conversion to protobuf."""
