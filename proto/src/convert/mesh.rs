//! Meshes in messages.

use zeroshard_model::{Error, ProcessMesh, Result};

use crate::pb;

impl From<&ProcessMesh> for pb::Mesh {
    fn from(mesh: &ProcessMesh) -> Self {
        let dim = |(&size, name): (&usize, &String)| pb::MeshDim {
            name: name.clone(),
            size: size as u32,
        };
        let dims = mesh.shape().iter().zip(mesh.names()).map(dim);
        Self { dims: dims.collect(), ranks: mesh.ranks().to_vec() }
    }
}

impl TryFrom<pb::Mesh> for ProcessMesh {
    type Error = Error;

    fn try_from(message: pb::Mesh) -> Result<Self> {
        let dims = message.dims.into_iter().map(|dim| (dim.size as usize, dim.name));
        let (shape, names): (Vec<usize>, Vec<String>) = dims.unzip();
        Self::new(shape, message.ranks, names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_survives_the_wire() {
        let mesh = ProcessMesh::new([2, 3], [5, 4, 3, 2, 1, 0], ["dp", "tp"]).unwrap();
        assert_eq!(ProcessMesh::try_from(pb::Mesh::from(&mesh)), Ok(mesh.clone()));
    }
}
