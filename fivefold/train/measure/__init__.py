"""What one step really did: bytes, FLOPs and messages under the ``meter``, as a rank's ``measured_step``."""
