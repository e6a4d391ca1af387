//! `zsctl plan`, compared with what shard servers then use.

use serde_json::Value;
use zeroshard_client::ServerStatus;
use zeroshard_model::{DType, JobSpec, Manifest, Optimizer, Policy, TensorSpec};
use zeroshard_tests::{Cluster, run, synthetic};

use crate::{connect, start};

/// The bytes of the arrays of slices on a server.
fn used(server: &ServerStatus) -> u64 {
    let ServerStatus { master_bytes, state_bytes, accumulator_bytes, published_bytes, .. } = server;
    master_bytes + state_bytes + accumulator_bytes + published_bytes
}

/// A safetensors file without values, whose header has these shapes.
fn header(tensors: &[TensorSpec]) -> Vec<u8> {
    let tensor = |tensor: &TensorSpec| {
        let shape =
            serde_json::json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [0, 0]});
        (tensor.name.clone(), shape)
    };
    let header: serde_json::Map<_, _> = tensors.iter().map(tensor).collect();
    let text = serde_json::to_vec(&header).unwrap();
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

#[tokio::test]
async fn servers_use_what_the_plan_says_for_ten_shapes() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.safetensors");
    let cases: [(&str, DType, u32, &[&[u64]]); 10] = [
        ("adamw", DType::F32, 1, &[&[1_000_003]]),
        ("adamw", DType::Bf16, 1, &[&[2048, 2048], &[2048], &[700, 3]]),
        ("adamw", DType::F32, 2, &[&[5_000_000]]),
        ("sgd", DType::F32, 1, &[&[300, 7000], &[1]]),
        ("adam", DType::F16, 1, &[&[64, 64], &[64, 64], &[64]]),
        ("lion", DType::F32, 2, &[&[1_200_000], &[50, 50, 50]]),
        ("adagrad", DType::Bf16, 1, &[&[3_000_000]]),
        ("lamb", DType::F32, 1, &[&[1000, 2000], &[2000], &[4000, 500]]),
        ("adafactor", DType::Bf16, 1, &[&[1500, 1000], &[1500]]),
        ("rmsprop", DType::F32, 1, &[&[128, 9000], &[]]),
    ];
    for (number, (optimizer, dtype, replicas, shapes)) in cases.into_iter().enumerate() {
        let optimizer: Optimizer = optimizer.parse().unwrap();
        let whole = optimizer.needs_whole_tensors();
        let policy = if whole { Policy::Whole } else { Policy::Elementwise };
        let tensor = |(index, shape): (usize, &&[u64])| TensorSpec {
            dtype,
            policy,
            ..TensorSpec::new(format!("t{index}"), *shape)
        };
        let tensors: Vec<_> = shapes.iter().enumerate().map(tensor).collect();
        std::fs::write(&file, header(&tensors)).unwrap();
        let (replicas, name) = (replicas.to_string(), optimizer.name());
        let dtype = dtype.to_string();
        let flags = ["--dtype", &dtype, "--servers", "2", "--replicas", &replicas];
        let model = ["--json", "plan", "--safetensors", file.to_str().unwrap()];
        let output = run("zsctl", &[&model[..], &["--optimizer", name], &flags].concat());
        let plan: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));

        let cluster = Cluster::start(2);
        let groups = vec![optimizer];
        let spec = JobSpec {
            replicas: replicas.parse().unwrap(),
            min_servers: 2,
            ..JobSpec::new(format!("job{number}"), Manifest::new(tensors).unwrap(), groups)
        };
        let jobs = start(cluster.address(), &spec).await;
        // The sums of gradients exist while a step is open.
        let gradients = synthetic::gradients(&spec.manifest, 0, 0);
        jobs[0].attempt(0).unwrap().push(gradients).await.unwrap();
        let client = connect(cluster.address()).await;
        let expected = plan["servers_bytes"].as_u64().unwrap() as f64;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        // Servers report their memory once a second.
        let found = loop {
            let servers = client.status().await.unwrap().servers;
            let found: Vec<u64> = servers.iter().map(used).collect();
            if found.iter().sum::<u64>() as f64 == expected || std::time::Instant::now() > deadline
            {
                break found;
            }
            tokio::task::yield_now().await;
        };
        let all = found.iter().sum::<u64>() as f64;
        assert!((all / expected - 1.0).abs() <= 0.03, "{name} {shapes:?}: {found:?} for {plan}");
        let (largest, planned) =
            (*found.iter().max().unwrap() as f64, plan["largest_server_bytes"].as_f64().unwrap());
        assert!((largest / planned - 1.0).abs() <= 0.03, "{name} {shapes:?}: {found:?} for {plan}");
        println!("{name} {shapes:?}: {found:?}, planned {expected} and {planned}");
    }
}
