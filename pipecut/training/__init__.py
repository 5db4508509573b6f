"""Parts of a training job around the step: norms, checkpoints, mixed precision, metrics and meshes."""

from .checkpoint import CheckpointSave as CheckpointSave
from .checkpoint import LoadedCheckpoint as LoadedCheckpoint
from .checkpoint import cannot_write as cannot_write
from .checkpoint import export_safetensors as export_safetensors
from .checkpoint import latest_checkpoint as latest_checkpoint
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import replace_directory as replace_directory
from .checkpoint import save_checkpoint as save_checkpoint
from .mesh import TrainingMesh as TrainingMesh
from .mesh import device_mesh as device_mesh
from .mesh import init_process_group as init_process_group
from .mesh import warn_of_restarts as warn_of_restarts
from .norms import clip_grad_norm_ as clip_grad_norm_
from .norms import get_total_norm as get_total_norm
from .progress import Progress as Progress
from .scaler import GradScaler as GradScaler
