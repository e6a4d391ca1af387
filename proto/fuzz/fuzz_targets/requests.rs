//! Decodes arbitrary bytes as requests. The conversion must not panic, and an accepted request must
//! survive a round trip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use zeroshard_model::{JobSpec, Optimizer, Placement, TensorSpec};
use zeroshard_proto::pb;

fuzz_target!(|data: &[u8]| {
    let Some((&kind, message)) = data.split_first() else { return };
    match kind % 4 {
        0 => {
            let Ok(message) = pb::JobSpec::decode(message) else { return };
            let Ok(spec) = JobSpec::try_from(message) else { return };
            assert_eq!(spec.validate(), Ok(()));
            assert_eq!(JobSpec::try_from(pb::JobSpec::from(&spec)), Ok(spec));
        }
        1 => {
            let Ok(message) = pb::Placement::decode(message) else { return };
            let Ok(placement) = Placement::try_from(message) else { return };
            (0..placement.slices())
                .for_each(|slice| assert!(placement.primary(slice) < placement.servers().len()));
            assert_eq!(Placement::try_from(pb::Placement::from(&placement)), Ok(placement));
        }
        2 => {
            let Ok(message) = pb::Optimizer::decode(message) else { return };
            let Ok(optimizer) = Optimizer::try_from(message) else { return };
            // The values may be out of range, but validating them must not panic either.
            let _ = optimizer.validate();
            assert_eq!(Optimizer::try_from(pb::Optimizer::from(&optimizer)), Ok(optimizer));
        }
        _ => {
            let Ok(message) = pb::Tensor::decode(message) else { return };
            let Ok(tensor) = TensorSpec::try_from(message) else { return };
            assert_eq!(TensorSpec::try_from(pb::Tensor::from(&tensor)), Ok(tensor));
        }
    }
});
