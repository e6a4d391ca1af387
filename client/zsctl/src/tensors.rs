//! `zsctl tensors`: the tensors of a job.

use serde_json::json;
use zeroshard_client::{Cluster, Result};
use zeroshard_model::{JobSpec, TensorSpec};

use crate::table::{human, table};

/// Prints the tensors of a job and, if requested, their norms.
///
/// # Errors
/// Those of [`Cluster::describe_job`] and [`Cluster::norms`].
pub(crate) async fn run(job: &str, with_norms: bool, cluster: &Cluster, json: bool) -> Result<()> {
    let spec = cluster.describe_job(job).await?.spec;
    let norms = if with_norms { Some(cluster.norms(job).await?) } else { None };
    let mut slices = vec![0; spec.manifest.tensors().len()];
    for slice in spec.manifest.slices() {
        slices[slice.tensor] += 1;
    }
    let mut titles =
        vec!["TENSOR", "SHAPE", "DTYPE", "KIND", "GROUP", "LAYOUT", "PARAMETERS", "SIZE", "SLICES"];
    titles.extend(norms.is_some().then_some("NORM"));
    let mut rows = table(&titles);
    for (index, (tensor, slices)) in spec.manifest.tensors().iter().zip(slices).enumerate() {
        let norm = norms.as_ref().map(|norms| norms.tensors.get(index).copied().flatten());
        let (kind, layout) = (kind(tensor), layout(&spec, tensor));
        // A tied tensor has no values of its own.
        let bytes = match tensor.alias_of {
            Some(_) => 0,
            None => tensor.numel() * tensor.dtype.size() as u64,
        };
        let dtype = tensor.dtype.to_string();
        if json {
            let mut line = json!({
                "event": "tensor", "job": job, "name": tensor.name, "shape": tensor.shape,
                "dtype": dtype, "kind": kind, "group": tensor.group, "layout": layout,
                "parameters": tensor.numel(), "bytes": bytes, "slices": slices,
            });
            if let (Some(norm), Some(norms)) = (norm, &norms) {
                (line["norm"], line["version"]) = (json!(norm), json!(norms.version));
            }
            say!("{line}");
        }
        let mut row = vec![
            tensor.name.clone(),
            format!("{:?}", tensor.shape),
            dtype,
            kind,
            tensor.group.to_string(),
            layout,
            tensor.numel().to_string(),
            human(bytes),
            slices.to_string(),
        ];
        row.extend(norm.map(|norm| norm.map_or("-".to_owned(), |norm| format!("{norm:.6e}"))));
        rows.add_row(row);
    }
    if !json {
        let (tensors, parameters) = (spec.manifest.tensors().len(), spec.manifest.parameters());
        let version = norms.map(|norms| format!(", norms of version {}", norms.version));
        let version = version.unwrap_or_default();
        say!("job {job:?}: {tensors} tensors, {parameters} parameters{version}\n\n{rows}");
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
