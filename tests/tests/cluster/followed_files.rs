//! `zsctl follow` writes the versions of a job to files for other programs.
//!
//! promise: consistent-reads

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    slice,
};

use half::{bf16, f16};
use serde_json::{Value, json};
use zeroshard_client::Job;
use zeroshard_model::{DType, JobSpec, TensorSpec};
use zeroshard_tests::{Cluster, binary, safetensors::read as tensors, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, until_saved},
    connect, job,
    operators::{lines, stderr, zsctl},
    replicas::step,
    restored::train,
    sgd, start, until,
};

/// A running `zsctl follow`, which is killed when this value is dropped.
struct Following(Option<Child>);

impl Following {
    fn start(cluster: &Cluster, job: &str, to: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new(binary("zsctl"));
        command.args(["--address", cluster.address(), "--json", "follow", job, "--to"]).arg(to);
        command.args(flags).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(command.spawn().unwrap()))
    }

    fn signal(&self, name: &str) {
        let id = self.0.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    /// Waits until the process has ended.
    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Waits until the process has succeeded. Returns its lines.
    fn succeeded(self) -> Vec<Value> {
        let output = self.output();
        assert!(output.status.success(), "{}", stderr(&output));
        lines(&output)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The names in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

fn latest(directory: &Path) -> PathBuf {
    fs::read_link(directory.join("latest")).unwrap()
}

/// Returns the tensors that files should have, as the trainer has pulled them.
async fn pulled(trainer: &Job, version: u64, dtype: DType) -> BTreeMap<String, (String, Vec<u8>)> {
    let values = training::pull(trainer, version).await.unwrap();
    let tensors = trainer.spec().manifest.tensors().iter().zip(values);
    let own = tensors.filter(|(tensor, _)| tensor.alias_of.is_none());
    let encoded = own.map(|(tensor, values)| {
        let dtype = if tensor.buffer { tensor.dtype } else { dtype };
        let bytes = values.into_iter().flat_map(|value| match dtype {
            DType::F32 => value.to_le_bytes().to_vec(),
            DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        });
        (tensor.name.clone(), (dtype.name().to_uppercase(), bytes.collect()))
    });
    encoded.collect()
}

async fn until_written(directory: &Path, version: &str) {
    let path = directory.join(version);
    until(&format!("version {version} is written"), || path.exists()).await;
}

#[tokio::test]
async fn each_version_is_written_as_the_trainer_has_it() {
    const STEPS: u64 = 5;
    let (out, cluster) = (directory(), Cluster::start(2));
    let out = out.path().join("new/versions");
    let mut tensors_of_job = synthetic::kinds_and_large(&adamw());
    for tensor in &mut tensors_of_job {
        match &*tensor.name {
            "bias" | "running_mean" => tensor.dtype = DType::Bf16,
            _ => {}
        }
    }
    let spec = job("files", 1, adamw(), tensors_of_job);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("files", 0).await.unwrap();
    let until = STEPS.to_string();
    let flags = ["--dtype", "bf16", "--until", &until, "--keep", "0", "--file-bytes", "300000"];
    let following = Following::start(&cluster, "files", &out, &flags);
    // It has created its directory before the job has a version.
    until_written(&out, "follow.json").await;
    trainer.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let mut expected = Vec::new();
    for version in 0..=STEPS {
        until_written(&out, &version.to_string()).await;
        expected.push(pulled(&trainer, version, DType::Bf16).await);
        if version < STEPS {
            step(&trainer, version).await;
        }
    }
    let lines = following.succeeded();
    let found = lines.iter().map(|line| line["version"].as_u64().unwrap());
    assert_eq!(found.collect::<Vec<_>>(), (0..=STEPS).collect::<Vec<_>>());
    assert_eq!(lines[0]["copied"], "joined");
    for (version, (line, expected)) in lines.iter().zip(expected).enumerate() {
        let path = out.join(version.to_string());
        assert!(names(&path).len() > 2, "several files, and an index");
        assert!(tensors(&path) == expected, "version {version}");
        assert_eq!(line["to"], path.to_str().unwrap());
        if version > 0 {
            assert_eq!((&line["copied"], &line["versions"]), (&Value::Null, &1.into()), "{line}");
            assert!(line["changed_fraction"].as_f64().unwrap() > 0.0, "{line}");
            assert_ne!(line["hash"], lines[version - 1]["hash"]);
        }
    }
    assert_eq!(latest(&out), Path::new(&until));
    // All of it is there already.
    let again = Following::start(&cluster, "files", &out, &flags).succeeded();
    assert!(again.is_empty(), "{again:?}");
}

#[tokio::test]
async fn a_process_that_is_killed_leaves_no_partial_version() {
    let (out, cluster) = (directory(), Cluster::start(1));
    let out = out.path();
    let spec = job("killed", 1, sgd(0.1), vec![TensorSpec::new("w", [6 << 20])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let leftover = || {
        let names = fs::read_dir(out).into_iter().flatten();
        let mut names = names.map(|of| of.unwrap().file_name().into_string().unwrap());
        names.any(|name| {
            name.starts_with('.') && !name.contains("follow") && !name.contains("latest")
        })
    };
    let mut version = 0;
    loop {
        let following = Following::start(&cluster, "killed", out, &["--keep", "0"]);
        until("zsctl writes a version", leftover).await;
        following.signal("-KILL");
        drop(following);
        for name in names(out).iter().filter(|name| name.parse::<u64>().is_ok()) {
            let expected = 24 << 20;
            assert_eq!(tensors(&out.join(name))["w"].1.len(), expected, "{name} is complete");
        }
        // The process may have completed the version before the signal came.
        if leftover() {
            break;
        }
        step(&trainer, version).await;
        version += 1;
    }
    let version = version.to_string();
    Following::start(&cluster, "killed", out, &["--keep", "0", "--until", &version]).succeeded();
    assert!(!leftover() && latest(out) == Path::new(&version));
    let number = version.parse().unwrap();
    assert!(tensors(&out.join(version)) == pulled(&trainer, number, DType::F32).await);
}

#[tokio::test]
async fn after_a_rewind_latest_is_the_version_on_the_new_line() {
    let (saves, out, cluster) = (directory(), directory(), Cluster::start(2));
    let out = out.path();
    let checkpoints = Some(policy(saves.path(), 2));
    let spec = JobSpec { checkpoints, ..job("back", 1, sgd(0.1), synthetic::small()) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let following =
        Following::start(&cluster, "back", out, &["--keep", "0", "--until", "5", "--every", "4"]);
    until_written(out, "0").await;
    for number in 0..4 {
        step(&trainer, number).await;
        if number == 1 {
            until_saved(saves.path(), "back", 2).await;
        }
    }
    until_written(out, "4").await;
    let before = pulled(&trainer, 4, DType::F32).await;
    let client = connect(cluster.address()).await;
    assert_eq!(client.rewind("back", 2, None, slice::from_ref(&(2..4))).await.unwrap(), 1);
    assert_eq!(train(&trainer, 4, 5).await, [2]);
    let lines = following.succeeded();
    let last = lines.last().unwrap();
    assert_eq!((&last["version"], &last["line"]), (&5.into(), &1.into()), "{lines:?}");
    assert!(lines.iter().any(|line| line["copied"] == "rewound"), "{lines:?}");
    assert_eq!(latest(out), Path::new("5@1"));
    assert!(tensors(&out.join("4")) == before);
    assert!(tensors(&out.join("5@1")) == pulled(&trainer, 5, DType::F32).await);
}

#[tokio::test]
async fn a_job_that_is_created_again_does_not_reuse_names() {
    let (out, cluster) = (directory(), Cluster::start(1));
    let out = out.path();
    let client = connect(cluster.address()).await;
    for (run, steps) in [2, 1].into_iter().enumerate() {
        let spec = job("again", 1, sgd(0.1 * (run + 1) as f64), synthetic::small());
        let trainer = start(cluster.address(), &spec).await.remove(0);
        for number in 0..steps {
            step(&trainer, number).await;
        }
        let steps = steps.to_string();
        let lines = Following::start(&cluster, "again", out, &["--until", &steps]).succeeded();
        assert_eq!(lines.len(), 1);
        let name = match run {
            0 => steps,
            _ => format!("{steps}-{:016x}", client.describe_job("again").await.unwrap().id),
        };
        assert_eq!(latest(out), Path::new(&name));
        let number = lines[0]["version"].as_u64().unwrap();
        assert!(tensors(&out.join(&name)) == pulled(&trainer, number, DType::F32).await);
        client.delete_job("again").await.unwrap();
    }
    assert_eq!(names(out).len(), 4, "two versions, the link, and follow.json");
}

#[tokio::test]
async fn flags_select_versions_and_tensors_and_mistakes_are_refused() {
    let (out, cluster) = (directory(), Cluster::start(1));
    let (root, out) = (out.path(), out.path().join("versions"));
    let spec = job("some", 1, sgd(0.1), synthetic::small());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let flags = ["--every", "3", "--keep", "2", "--tensors", "w", "--until", "7"];
    let following = Following::start(&cluster, "some", &out, &flags);
    for (steps, written) in [(0..0, "0"), (0..3, "3"), (3..6, "6")] {
        for number in steps {
            step(&trainer, number).await;
        }
        until_written(&out, written).await;
    }
    let refused = |to: &Path, flags: &[&str]| {
        let arguments = [&["follow", "some", "--to", to.to_str().unwrap()], flags].concat();
        let output = zsctl(&cluster, &arguments);
        assert_ne!(output.status.code(), Some(0));
        stderr(&output)
    };
    let said = refused(&out, &["--tensors", "w"]);
    assert!(said.contains("another `zsctl follow` writes to"), "{said}");
    until("top counts the follower", || {
        let shown = lines(&zsctl(&cluster, &["top", "--once", "--json"]));
        let of = |line: &&Value| line["event"] == "job";
        let job = shown.iter().find(of).cloned().unwrap_or_default();
        job["followers"] == 1 && job["follower_lags"] == json!([0])
    })
    .await;
    step(&trainer, 6).await;
    let lines = following.succeeded();
    let written = lines.iter().map(|line| line["version"].as_u64().unwrap());
    assert_eq!(written.collect::<Vec<_>>(), [0, 3, 6, 7]);
    assert_eq!(names(&out), ["6", "7", "follow.json", "latest"]);
    let mut expected = pulled(&trainer, 7, DType::F32).await;
    expected.remove("b");
    assert!(tensors(&out.join("latest")) == expected);

    let file = root.join("file");
    fs::write(&file, "").unwrap();
    let other = root.join("other");
    fs::create_dir_all(other.join("3")).unwrap();
    for (to, flags, expected) in [
        (&out, &["--tensors", "w", "--dtype", "f16"][..], "another --dtype"),
        (&out, &[], "another --tensors"),
        (&root.join("new"), &["--tensors", "nothing"], "no tensor \"nothing\""),
        (&root.join("new"), &["--every", "0"], "--every"),
        (&root.join("new"), &["--dtype", "f8"], "bf16"),
        (&file, &[], "cannot write"),
        (&other, &[], "choose another directory"),
    ] {
        let said = refused(to, flags);
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
    let unknown = zsctl(&cluster, &["follow", "none", "--to", out.to_str().unwrap()]);
    assert!(stderr(&unknown).contains("\"none\" does not exist"), "{unknown:?}");
    assert_eq!(names(root), ["file", "other", "versions"], "nothing is created");

    let all = root.join("all");
    let following = Following::start(&cluster, "some", &all, &[]);
    until_written(&all, "latest").await;
    following.signal("-INT");
    assert_eq!(following.succeeded().len(), 1);
}
