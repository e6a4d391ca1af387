//! Checkpoints in a directory: written, read, damaged and removed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use zeroshard_checkpoint::{Export, Manifest, Part, SavedSlice, exported_bytes};
use zeroshard_model::{Error, JobSpec, Optimizer, RunningAverage, average};

use common::{JOB, LINE, Saved, VERSION, on_line_0, spec};

/// A slice as [`zeroshard_checkpoint::Storage::stream_slice`] passes it on.
async fn streamed(saved: &Saved, manifest: &Manifest, slice: u32) -> Result<SavedSlice, Error> {
    let expected = saved.content.slice(slice);
    let state = vec![Vec::new(); expected.state.len()];
    let received = Arc::new(Mutex::new((Vec::new(), state)));
    let parts = received.clone();
    let store = move |part, at, bytes: &[u8]| {
        let mut parts = parts.lock().unwrap();
        let to = match part {
            Part::Values => &mut parts.0,
            Part::State(position) => &mut parts.1[position],
        };
        assert_eq!(to.len(), at, "the pieces are passed in order");
        to.extend_from_slice(bytes);
        Ok(())
    };
    let applied = saved.storage.stream_slice(manifest, slice, store).await?;
    let (values, state) = std::mem::take(&mut *received.lock().unwrap());
    let state = state.into_iter().map(Into::into).collect();
    Ok(SavedSlice { values: values.into(), state, applied })
}

#[tokio::test]
async fn slices_and_data_are_read_as_they_were_written() {
    let averages = ["slow", "fast"].map(|name| RunningAverage::exponential(name, 0.9));
    let averaged = JobSpec { averages: averages.into(), ..spec("adamw") };
    for spec in Optimizer::NAMES.iter().map(|name| spec(name)).chain([averaged]) {
        let optimizer = spec.groups[0].name();
        let saved = Saved::of(spec);
        let manifest = saved.save(VERSION, 5).await;
        assert_eq!(manifest.spec(), &saved.content.spec);
        assert_eq!(
            (manifest.version(), manifest.job_id(), manifest.save()),
            (on_line_0(VERSION), 9, 5)
        );
        for slice in 0..saved.content.spec.manifest.number_of_slices() as u32 {
            let read = saved.storage.read_slice(&manifest, slice).await.unwrap();
            assert_eq!(read, saved.content.slice(slice), "{optimizer}, slice {slice}");
            assert_eq!(streamed(&saved, &manifest, slice).await.unwrap(), read);
            assert!(saved.content.done.lock().unwrap().contains(&slice));
        }
        assert_eq!(manifest.ranks(), [0, 3]);
        let data = |rank| saved.storage.user_data(&manifest, rank);
        assert_eq!(data(0).await.unwrap().unwrap(), "random state");
        assert_eq!(data(3).await.unwrap().unwrap().len(), 1000);
        assert_eq!(data(1).await.unwrap(), None);
        let mut bytes = 0;
        saved.storage.verify(&manifest, |read| bytes += read).await.unwrap();
        assert_eq!(bytes, manifest.bytes());
    }
}

#[tokio::test]
async fn data_that_was_lost_before_the_save_is_an_error_and_not_absent() {
    let saved = Saved::new("sgd");
    let files = saved.files(VERSION, 5).await;
    let manifest = Manifest::new(&saved.content.spec, 9, on_line_0(VERSION), 5, files).unwrap();
    assert!(saved.storage.commit(&manifest.without_data_of([1, 2])).await.unwrap());
    let manifest = saved.storage.manifest(JOB, on_line_0(VERSION)).await.unwrap();
    assert_eq!(manifest.lost_ranks(), [1, 2]);
    let lost = saved.storage.user_data(&manifest, 2).await;
    assert!(matches!(lost, Err(Error::UserDataLost { version: VERSION, rank: 2, .. })), "{lost:?}");
    assert_eq!(saved.storage.user_data(&manifest, 4).await.unwrap(), None);
}

#[tokio::test]
async fn every_change_of_a_byte_is_found_and_names_the_file() {
    let saved = Saved::new("adafactor");
    saved.save(VERSION, 5).await;
    saved.check().await.unwrap();
    for path in saved.paths() {
        let original = fs::read(&path).unwrap();
        // Of the manifest, which is long, every seventh byte.
        let step = if path.ends_with("manifest.json") { 7 } else { 1 };
        for position in (0..original.len()).step_by(step) {
            let mut changed = original.clone();
            changed[position] ^= 0x10;
            fs::write(&path, &changed).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            match saved.check().await {
                Err(Error::CheckpointDamaged { file, .. }) => {
                    assert!(file.contains(name), "{file} instead of {name}");
                }
                other => panic!("byte {position} of {name} has changed: {other:?}"),
            }
        }
        fs::write(&path, &original).unwrap();
    }
    saved.check().await.unwrap();
}

#[tokio::test]
async fn every_truncation_and_every_missing_file_is_found() {
    let saved = Saved::new("sgd");
    saved.save(VERSION, 5).await;
    for path in saved.paths() {
        let original = fs::read(&path).unwrap();
        let is_manifest = path.ends_with("manifest.json");
        for length in (0..original.len()).step_by(if is_manifest { 13 } else { 1 }) {
            fs::write(&path, &original[..length]).unwrap();
            let checked = saved.check().await;
            assert!(matches!(checked, Err(Error::CheckpointDamaged { .. })), "{checked:?}");
        }
        fs::remove_file(&path).unwrap();
        match saved.check().await {
            Err(Error::NoCheckpoint { .. }) if is_manifest => {}
            Err(Error::CheckpointDamaged { cause, .. }) if !is_manifest => {
                assert!(cause.contains("missing"), "{cause}");
            }
            other => panic!("{path:?} is missing: {other:?}"),
        }
        fs::write(&path, &original).unwrap();
    }
}

#[tokio::test]
async fn a_damaged_slice_is_not_restored() {
    let saved = Saved::new("adamw");
    let manifest = saved.save(VERSION, 5).await;
    let path = saved.paths().into_iter().find(|path| path.to_str().unwrap().contains("1-0.safe"));
    let path = path.unwrap();
    let mut contents = fs::read(&path).unwrap();
    *contents.last_mut().unwrap() ^= 1;
    fs::write(&path, contents).unwrap();
    let slices = 0..saved.content.spec.manifest.number_of_slices() as u32;
    let mut damaged = 0;
    for slice in slices {
        let read = saved.storage.read_slice(&manifest, slice).await;
        assert_eq!(streamed(&saved, &manifest, slice).await.is_ok(), read.is_ok());
        match streamed(&saved, &manifest, slice).await.and(read) {
            Ok(_) => {}
            Err(Error::CheckpointDamaged { file, cause }) => {
                assert!(file.ends_with(".safetensors") && cause.contains("exp_avg_sq"), "{cause}");
                damaged += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(damaged, 1);
}

#[tokio::test]
async fn a_slice_whose_file_is_missing_or_too_short_is_not_streamed() {
    let saved = Saved::new("sgd");
    let manifest = saved.save(VERSION, 5).await;
    let slices = 0..saved.content.spec.manifest.number_of_slices() as u32;
    let mut causes = Vec::new();
    for path in saved.paths() {
        let contents = fs::read(&path).unwrap();
        for damage in [contents.len() - 1, 0] {
            match damage {
                0 => fs::remove_file(&path).unwrap(),
                length => fs::write(&path, &contents[..length]).unwrap(),
            }
            for slice in slices.clone() {
                match streamed(&saved, &manifest, slice).await {
                    Ok(_) => {}
                    Err(Error::CheckpointDamaged { cause, .. }) => causes.push(cause),
                    Err(other) => panic!("{other}"),
                }
            }
            fs::write(&path, &contents).unwrap();
        }
    }
    assert!(causes.iter().any(|cause| cause.contains("ends 1 bytes early")), "{causes:?}");
    assert!(causes.iter().any(|cause| cause.contains("missing")), "{causes:?}");
}

#[tokio::test]
async fn files_without_a_manifest_are_no_checkpoint() {
    let saved = Saved::new("sgd");
    saved.files(VERSION, 5).await;
    assert!(saved.storage.versions(JOB).await.unwrap().is_empty());
    let missing = saved.storage.manifest(JOB, on_line_0(VERSION)).await;
    assert!(matches!(missing, Err(Error::NoCheckpoint { .. })));
    saved.storage.discard(JOB, on_line_0(VERSION), 6).await.unwrap();
    assert_eq!(saved.paths().len(), 3, "those of another save");
    saved.storage.discard(JOB, on_line_0(VERSION), 5).await.unwrap();
    assert_eq!(saved.paths().len(), 0);
}

#[tokio::test]
async fn of_two_saves_of_one_version_the_first_that_is_complete_remains() {
    let saved = Saved::new("sgd");
    let first = saved.save(VERSION, 5).await;
    let files = saved.files(VERSION, 6).await;
    let second = Manifest::new(&saved.content.spec, 9, on_line_0(VERSION), 6, files).unwrap();
    assert!(!saved.storage.commit(&second).await.unwrap());
    // The complete one is not discarded, even by mistake.
    saved.storage.discard(JOB, on_line_0(VERSION), 5).await.unwrap();
    saved.storage.discard(JOB, on_line_0(VERSION), 6).await.unwrap();
    saved.storage.verify(&first, |_| {}).await.unwrap();
    assert_eq!(saved.paths().len(), 4);
}

#[tokio::test]
async fn the_newest_checkpoints_are_kept() {
    let saved = Saved::new("sgd");
    for version in [1, 3, 5, 12] {
        saved.save(version, version).await;
    }
    saved.files(2, 100).await;
    saved.files(99, 100).await;
    assert_eq!(saved.storage.prune(JOB, LINE, 0).await.unwrap(), [], "all are kept");
    assert_eq!(saved.storage.versions(JOB).await.unwrap(), [1, 3, 5, 12].map(on_line_0));
    assert_eq!(saved.storage.prune(JOB, LINE, 2).await.unwrap(), [1, 3].map(on_line_0));
    assert_eq!(saved.storage.versions(JOB).await.unwrap(), [5, 12].map(on_line_0));
    assert_eq!(saved.paths().len(), 4 + 4 + 3, "the save of version 99 may be in progress");
    saved.storage.remove(JOB, on_line_0(5)).await.unwrap();
    assert!(matches!(
        saved.storage.remove(JOB, on_line_0(5)).await,
        Err(Error::NoCheckpoint { .. })
    ));
    assert_eq!(saved.storage.jobs().await.unwrap(), [JOB]);
    saved.check().await.unwrap();
}

#[tokio::test]
async fn a_later_format_and_hostile_manifests_are_refused() {
    let saved = Saved::new("sgd");
    saved.save(VERSION, 5).await;
    let path = saved.paths().into_iter().find(|path| path.ends_with("manifest.json")).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let inner = text.split_once("\"checkpoint\":").unwrap().1.strip_suffix('}').unwrap();
    let forge = |inner: &str| {
        let hash = blake3::hash(inner.as_bytes());
        fs::write(&path, format!("{{\"blake3\":\"{hash}\",\"checkpoint\":{inner}}}")).unwrap();
    };
    let refused = async || match saved.check().await {
        Err(Error::CheckpointDamaged { cause, .. }) => cause,
        other => panic!("{other:?}: {}", fs::read_to_string(&path).unwrap()),
    };
    let forge = |from: &str, to: &str| {
        assert!(inner.contains(from), "{from}");
        forge(&inner.replacen(from, to, 1));
    };
    forge("\"format\": 1", "\"format\": 3");
    assert!(refused().await.contains("install a later version"));
    let bytes = inner.split_once("\"bytes\": ").unwrap().1.split_once(',').unwrap().0;
    for huge in [u64::MAX.to_string(), "3".to_owned(), (1u64 << 60).to_string()] {
        forge(&format!("\"bytes\": {bytes}"), &format!("\"bytes\": {huge}"));
        refused().await;
    }
    forge("\"slice\": 0", "\"slice\": 4000000000");
    refused().await;
    for name in ["runs/a %", "0000000000000005-"] {
        let name = format!("\"name\": \"{name}");
        forge(&name, &name.replacen(": \"", ": \"../", 1));
        refused().await;
    }
    forge("\"shape\": [", "\"shape\": [18446744073709551615,");
    refused().await;
    // Fields of later versions are ignored, and absent ones have their defaults.
    forge("\"format\": 1", "\"format\": 1, \"later\": {}");
    saved.check().await.unwrap();
}

#[tokio::test]
async fn a_model_is_exported_in_its_own_dtypes() {
    let saved = Saved::new("adamw");
    let manifest = saved.save(VERSION, 5).await;
    let out = tempfile::tempdir().unwrap();
    // An export that was killed has left a directory.
    fs::create_dir(out.path().join(format!(".one.{}-0.partial", std::process::id()))).unwrap();
    for (name, file_bytes, files) in [("one", 1 << 30, 1), ("several", 30, 3)] {
        let directory = out.path().join(name);
        let export = Export { directory: &directory, file_bytes, average: None };
        let mut progress = 0;
        saved.storage.export(&manifest, &export, |bytes| progress += bytes).await.unwrap();
        assert_eq!(progress, exported_bytes(manifest.spec()));
        assert_eq!(tensors(&directory), ["empty", "frozen", "h/1", "mean", "scalar", "w"]);
        let written = fs::read_dir(&directory).unwrap().count();
        assert_eq!(written, if files == 1 { 1 } else { files + 1 }, "{directory:?}");
        let again = saved.storage.export(&manifest, &export, |_| {}).await;
        assert!(matches!(again, Err(Error::Storage { .. })), "it exists");
    }
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 3);
}

#[tokio::test]
async fn an_average_is_exported_in_place_of_the_parameters_that_train() {
    let averages = ["slow", "fast"].map(|name| RunningAverage::exponential(name, 0.9));
    let saved = Saved::of(JobSpec { averages: averages.into(), ..spec("adamw") });
    let manifest = saved.save(VERSION, 5).await;
    // A program that knows no averages says that it is too old.
    let path = saved.paths().into_iter().find(|path| path.ends_with("manifest.json")).unwrap();
    assert!(fs::read_to_string(path).unwrap().contains("\"format\": 2"));
    let out = tempfile::tempdir().unwrap();
    let exported = async |average: Option<&str>| {
        let directory = out.path().join(average.unwrap_or("parameters"));
        let export = Export { directory: &directory, file_bytes: 1 << 30, average };
        saved.storage.export(&manifest, &export, |_| {}).await?;
        Ok::<_, Error>(fs::read(directory.join("model.safetensors")).unwrap())
    };
    let [parameters, fast] = [exported(None).await.unwrap(), exported(Some("fast")).await.unwrap()];
    let job = manifest.spec();
    let position = job.state_position(0, &average::values_of("fast")).unwrap();
    let [values, averaged] =
        [Part::Values, Part::State(position)].map(|part| saved.content.bytes(0, part));
    let has = |file: &[u8], part: &[u8]| file.windows(part.len()).any(|window| window == part);
    assert!(has(&parameters, &values) && !has(&parameters, &averaged));
    assert!(has(&fast, &averaged) && !has(&fast, &values));
    let frozen = job.manifest.slices_of(job.manifest.find("frozen").unwrap().index()).start;
    assert!(has(&fast, &saved.content.bytes(frozen as u32, Part::Values)));
    let unknown = exported(Some("other")).await.unwrap_err().to_string();
    assert!(unknown.contains("\"other\"") && unknown.contains("slow"), "{unknown}");
}

#[tokio::test]
async fn an_export_that_fails_leaves_nothing() {
    let saved = Saved::new("adamw");
    let manifest = saved.save(VERSION, 5).await;
    let file = saved.paths().into_iter().find(|path| path.to_str().unwrap().contains("2-0.safe"));
    fs::remove_file(file.unwrap()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let directory = out.path().join("model");
    let export = Export { directory: &directory, file_bytes: 1 << 30, average: None };
    let failed = saved.storage.export(&manifest, &export, |_| {}).await;
    assert!(matches!(failed, Err(Error::CheckpointDamaged { .. })), "{failed:?}");
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

/// The names of all tensors in the files of a directory.
fn tensors(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for file in fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            let contents = fs::read(file).unwrap();
            let length = u64::from_le_bytes(contents[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value =
                serde_json::from_slice(&contents[8..8 + length]).unwrap();
            let end =
                header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
            let end = end.map(|(name, tensor)| {
                names.push(name.clone());
                tensor["data_offsets"][1].as_u64().unwrap()
            });
            assert_eq!(end.max().unwrap() as usize, contents.len() - 8 - length);
        }
    }
    names.sort_unstable();
    names
}
