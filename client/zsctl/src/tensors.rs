//! `zsctl tensors`: the tensors of a job.

use serde_json::json;
use zeroshard_client::{Cluster, Result};
use zeroshard_model::{JobSpec, TensorSpec};

use crate::table::{human, table};

/// Prints the tensors of a job.
///
/// # Errors
/// Those of [`Cluster::describe_job`].
pub(crate) async fn run(job: &str, cluster: &Cluster, json: bool) -> Result<()> {
    let spec = cluster.describe_job(job).await?.spec;
    let mut slices = vec![0; spec.manifest.tensors().len()];
    for slice in spec.manifest.slices() {
        slices[slice.tensor] += 1;
    }
    let mut rows = table(&[
        "TENSOR",
        "SHAPE",
        "DTYPE",
        "KIND",
        "GROUP",
        "LAYOUT",
        "PARAMETERS",
        "SIZE",
        "SLICES",
    ]);
    for (tensor, slices) in spec.manifest.tensors().iter().zip(slices) {
        let (kind, layout) = (kind(tensor), layout(&spec, tensor));
        // A tied tensor has no values of its own.
        let bytes = match tensor.alias_of {
            Some(_) => 0,
            None => tensor.numel() * tensor.dtype.size() as u64,
        };
        let dtype = tensor.dtype.to_string();
        if json {
            let line = json!({
                "event": "tensor", "job": job, "name": tensor.name, "shape": tensor.shape,
                "dtype": dtype, "kind": kind, "group": tensor.group, "layout": layout,
                "parameters": tensor.numel(), "bytes": bytes, "slices": slices,
            });
            say!("{line}");
        }
        rows.add_row(vec![
            tensor.name.clone(),
            format!("{:?}", tensor.shape),
            dtype,
            kind,
            tensor.group.to_string(),
            layout,
            tensor.numel().to_string(),
            human(bytes),
            slices.to_string(),
        ]);
    }
    if !json {
        let (tensors, parameters) = (spec.manifest.tensors().len(), spec.manifest.parameters());
        say!("job {job:?}: {tensors} tensors, {parameters} parameters\n\n{rows}");
    }
    Ok(())
}

/// The role of the tensor: a tied, frozen or trained tensor, or a buffer.
pub(crate) fn kind(tensor: &TensorSpec) -> String {
    match &tensor.alias_of {
        Some(owner) => format!("tied to {owner}"),
        None if tensor.buffer => "buffer".to_owned(),
        None if tensor.frozen => "frozen".to_owned(),
        None => "trained".to_owned(),
    }
}

/// The placement along each dimension of the mesh, such as `Shard(0) on tp, Replicate on dp`.
fn layout(spec: &JobSpec, tensor: &TensorSpec) -> String {
    let Some(layout) = &tensor.layout else { return "-".to_owned() };
    let names = spec.meshes.get(layout.mesh as usize).map_or(&[][..], |mesh| mesh.names());
    let placements = layout.placements.iter().enumerate().map(|(dim, placement)| {
        let name = names.get(dim).map_or("", String::as_str);
        format!("{placement} on {name}")
    });
    placements.collect::<Vec<_>>().join(", ")
}
