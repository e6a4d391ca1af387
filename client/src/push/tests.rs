//! What is sent after a refusal, and how it is cut into messages.

use zeroshard_model::{DType, JobSpec, TensorSpec};

use super::*;

fn encoding(wire: impl Into<Wire>) -> Encoding {
    Encoding { wire: wire.into(), seed: 0, step: 0 }
}

/// Three slices of one rank on one server: two of a large tensor and one of a small tensor.
fn plan() -> ServerPush {
    let tensors = vec![TensorSpec::new("large", [4_194_304 + 10]), TensorSpec::new("small", [5])];
    let spec = JobSpec::new("job", Manifest::new(tensors).unwrap(), vec!["sgd".parse().unwrap()]);
    let server = Server { id: 1, incarnation: 1, address: "host:1".into() };
    let placement = Placement::new(vec![server], 1, vec![0; 3]).unwrap();
    let numbers = |numel: usize| (0..numel).map(|i| i as f32).collect::<Vec<_>>();
    let data = [4_194_304 + 10, 5]
        .into_iter()
        .enumerate()
        .map(|(tensor, numel)| TensorData::new(TensorId::new(tensor), numbers(numel)))
        .collect();
    let locals = LocalTensor::all(&spec, 0);
    super::plan(&spec.manifest, &placement, &locals, Contents::Contributed(data)).unwrap().remove(0)
}

/// The slice, first element and number of elements of all values to be sent.
fn values_of(plan: &ServerPush) -> Vec<(u32, usize, usize)> {
    plan.values.iter().map(|values| (values.slice, values.offset, values.range.len())).collect()
}

#[test]
fn after_a_full_buffer_only_refused_elements_are_sent_and_the_refused_slice_is_last() {
    let mut plan = plan();
    assert_eq!(values_of(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
    plan.put_off(1, 4, 1);
    assert_eq!(values_of(&plan), [(2, 0, 5), (1, 4, 6)]);
    assert_eq!(plan.values[1].range, 4_194_308..4_194_314, "the values follow the numbers");
    plan.put_off(1, 7, 1);
    assert_eq!(values_of(&plan), [(1, 7, 3)]);
    plan.put_off(1, 10, 1);
    assert!(values_of(&plan).is_empty());
}

#[test]
fn a_refusal_of_unsent_elements_drops_nothing() {
    let mut plan = plan();
    plan.put_off(7, 0, 1);
    assert_eq!(values_of(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
    plan.put_off(1, u64::MAX, 1);
    assert_eq!(values_of(&plan), [(2, 0, 5), (1, 0, 10)]);
    plan.put_off(1, 6, 1);
    plan.put_off(1, 5, 1);
    assert_eq!(values_of(&plan), [(1, 6, 4)], "an earlier element than the first");
}

#[tokio::test]
async fn the_rest_of_a_refused_slice_keeps_its_element_numbers() {
    use futures_util::StreamExt;
    use zeroshard_proto::frame::{Decoder, Event};

    let mut plan = plan();
    plan.put_off(1, 4, 1);
    let mut decoder = Decoder::new(1 << 20);
    let mut frames =
        std::pin::pin!(plan.frames(&pb::PushBegin::default(), encoding(DType::F32), 16, None));
    let mut extents = Vec::new();
    while let Some(Ok(frame)) = frames.next().await {
        decoder.feed(frame.into_data().unwrap());
        while let Some(event) = decoder.next().unwrap() {
            if let Event::Extent(extent, elements) = event {
                extents.push((extent.slice, extent.offset, elements));
            }
        }
    }
    assert_eq!(extents, [(2, 0, 4), (2, 4, 1), (1, 4, 4), (1, 8, 2)]);
}

#[tokio::test]
async fn int8_messages_begin_with_a_tile_also_after_a_refusal_within_one() {
    use futures_util::StreamExt;
    use zeroshard_loops::{
        Level,
        int8::{self, Rounding},
    };
    use zeroshard_proto::frame::{Decoder, Event};

    let mut plan = plan();
    plan.values[0].range = 0..1000;
    plan.put_off(0, 300, Wire::Int8.grain());
    assert_eq!(values_of(&plan), [(1, 0, 10), (2, 0, 5), (0, 256, 744)]);
    let mut decoder = Decoder::new(1 << 20);
    let begin = pb::PushBegin::default();
    let encoding = Encoding { wire: Wire::Int8, seed: 7, step: 3 };
    let mut frames = std::pin::pin!(plan.frames(&begin, encoding, 300, None));
    let (mut extents, mut payload) = (Vec::new(), Vec::new());
    while let Some(Ok(frame)) = frames.next().await {
        decoder.feed(frame.into_data().unwrap());
        while let Some(event) = decoder.next().unwrap() {
            match event {
                Event::Extent(extent, elements) => {
                    extents.push((extent.slice, extent.offset, elements));
                }
                Event::Payload(bytes) => payload.extend_from_slice(&bytes),
                _ => {}
            }
        }
    }
    let tiles = [(0, 256, 256), (0, 512, 256), (0, 768, 232)];
    assert_eq!(extents, [&[(1, 0, 10), (2, 0, 5)], &tiles[..]].concat());
    let values: Vec<u8> = (256..1000).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut expected = vec![0; Wire::Int8.bytes(1000 - 256)];
    let rounding = Rounding::of_gradient(7, 3, 0, 0);
    int8::encode(Level::best(), &values, DType::F32, 256, &rounding, &mut expected);
    assert_eq!(payload[payload.len() - expected.len()..], expected);
}
