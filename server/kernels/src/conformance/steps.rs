//! Compares optimizer steps with [`super::reference`].

use std::{ops::Range, sync::Arc};

use zeroshard_model::{
    dtype::DType,
    geometry::blocks::BLOCK,
    optimizer::{
        AppliedSteps, Optimizer,
        StateDType::{self, F32, Int8},
        StateShape,
    },
};

use super::{assert_same, buffer_of, codes, contents, from_bytes, numbers, reference, to_bytes};
use crate::{Backend, DeviceName, Output, Position, Record, Update, optim::golden};

/// What the cases of the golden vectors do not reach, or not in their first steps.
const FURTHER: [&str; 15] = [
    r#"{"name":"asgd","t0":1.0,"lambd":0.1,"weight_decay":0.1}"#,
    r#"{"name":"asgd","t0":-1.0,"alpha":0.5,"maximize":true}"#,
    r#"{"name":"adam","beta1":0.0,"beta2":0.0}"#,
    r#"{"name":"nadam","beta1":0.3,"momentum_decay":0.5,"weight_decay":0.1}"#,
    r#"{"name":"nadam","beta1":0.0,"beta2":0.0,"maximize":true}"#,
    r#"{"name":"radam","beta2":0.6,"weight_decay":0.1}"#,
    r#"{"name":"radam","beta2":0.9,"weight_decay":0.1,"decoupled_weight_decay":true}"#,
    r#"{"name":"radam","beta2":0.0,"maximize":true}"#,
    r#"{"name":"adadelta","rho":1.0}"#,
    r#"{"name":"adafactor","eps1":0.1,"eps2":10.0,"lr":1.0}"#,
    r#"{"name":"adafactor","eps1":0.0,"d":1e9}"#,
    r#"{"name":"rmsprop","centered":true,"alpha":0.3}"#,
    r#"{"name":"lamb","maximize":true,"eps":0.1}"#,
    r#"{"name":"lamb","beta1":0.25}"#,
    r#"{"name":"average"}"#,
];

/// Rows that are shorter and longer than the lanes of a sum, and several matrices.
const MATRICES: [&[usize]; 9] = [
    &[1, 1],
    &[3, 0],
    &[1, 1_003],
    &[1_003, 1],
    &[37, 53],
    &[4, 16],
    &[3, 5, 33],
    &[8, 4, 3, 3],
    &[5, 7, 1, 1],
];

pub(super) fn run<B: Backend>(backend: &B) {
    let further = FURTHER.iter().map(|json| serde_json::from_str(json).unwrap());
    for optimizer in golden::cases().map(|case| case.optimizer).chain(further) {
        optimizer.validate().unwrap();
        for numel in [0, 1, 7, 1_003, 2_049] {
            steps_equal_the_reference(backend, &optimizer, F32, &[numel], None);
        }
        for dtype in DType::ALL {
            steps_equal_the_reference(backend, &optimizer, F32, &[4_099], Some(dtype));
        }
        if optimizer.state_codes().is_some_and(|codes| !codes.is_empty()) {
            for (numel, dtype) in [(0, None), (1, None), (2_049, None), (4_099, Some(DType::Bf16))]
            {
                steps_equal_the_reference(backend, &optimizer, Int8, &[numel], dtype);
            }
        }
        if optimizer.state_shapes(&[1, 1]) != optimizer.state_shapes(&[1]) {
            for shape in MATRICES {
                steps_equal_the_reference(backend, &optimizer, F32, shape, Some(DType::Bf16));
            }
        }
    }
    let lamb = "lamb".parse().unwrap();
    steps_equal_the_reference(backend, &lamb, F32, &[BLOCK], None);
    steps_equal_the_reference(backend, &lamb, F32, &[2 * BLOCK + 77], Some(DType::Bf16));
    a_zero_norm_is_trusted(backend);
    parts_of_a_tensor_are_rounded_like_the_whole(backend);
}

/// A step with 8-bit state over two parts of a tensor gives the values of a step over the whole.
fn parts_of_a_tensor_are_rounded_like_the_whole<B: Backend>(backend: &B) {
    let optimizer: Optimizer = "adamw".parse().unwrap();
    let values = numbers(50, 1_003);
    let step = |range: Range<usize>, first: u64| {
        let at = Position { tensor: 3, element: first + range.start as u64 };
        let update = Update { at, ..Update::after(AppliedSteps::default(), &optimizer, 1.0) };
        let of_range = buffer_of(backend, &values[range.clone()], DType::F32);
        let mut master = backend.another(&of_range).unwrap();
        let codes = optimizer.state_codes().unwrap().iter();
        let mut state: Vec<_> =
            codes.map(|&code| backend.allocate_coded(code, range.len()).unwrap()).collect();
        let outputs = state.iter_mut().map(Into::into).collect();
        backend.apply(&update, (&mut master).into(), outputs, Some(&of_range), None, None).unwrap();
        let read = |buffer| backend.read(&Arc::new(buffer), 0..range.len(), DType::F32).unwrap();
        state.into_iter().map(read).collect::<Vec<_>>()
    };
    let (whole, parts) = (step(0..1_003, 0), [0..384, 384..1_003].map(|range| step(range, 0)));
    for (position, whole) in whole.iter().enumerate() {
        let parts: Vec<u8> = parts.iter().flat_map(|part| part[position].iter().copied()).collect();
        assert!(*whole == parts, "state tensor {position}");
    }
    assert!(step(0..1_003, 128) != whole, "other elements are rounded differently");
}

/// What a step has recorded.
#[derive(Default)]
struct Seen {
    before: Vec<f32>,
    after: Vec<f32>,
}

impl Record for Seen {
    fn record(&mut self, before: &[f32], after: &[f32]) {
        self.before.extend_from_slice(before);
        self.after.extend_from_slice(after);
    }
}

impl Seen {
    fn assert_is(&self, before: &[f32], after: &[f32]) {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(&self.before) == bits(before), "the old parameters are recorded");
        assert!(bits(&self.after) == bits(after), "the new parameters are recorded");
    }
}

/// A few steps with different learning rates and coefficients give the same parameters, state and
/// cast parameters.
fn steps_equal_the_reference<B: Backend>(
    backend: &B,
    optimizer: &Optimizer,
    state_dtype: StateDType,
    shape: &[usize],
    published_as: Option<DType>,
) {
    let numel = shape.iter().product();
    let mut expected = numbers(10, numel);
    // Sums and averages of squares are positive. A first step must not depend on a momentum buffer.
    let initial: Vec<f32> = numbers(11, numel).iter().map(|value| value * value).collect();
    let dims: Vec<u64> = shape.iter().map(|&size| size as u64).collect();
    let shapes = optimizer.state_shapes(&dims);
    let of_shape = |of: &StateShape| initial[..of.numel(numel)].to_vec();
    let mut expected_state: Vec<_> = shapes.iter().map(of_shape).collect();
    let state_codes = match state_dtype {
        F32 => &[],
        Int8 => optimizer.state_codes().unwrap(),
    };
    let mut arrays = vec![buffer_of(backend, &expected, DType::F32)];
    for (position, values) in expected_state.iter_mut().enumerate() {
        arrays.push(match state_codes.get(position) {
            None => buffer_of(backend, values, DType::F32),
            Some(&code) => codes::coded(backend, code, values),
        });
        if let Some(&code) = state_codes.get(position) {
            *values = codes::stored(code, values);
        }
    }
    let mut applied = AppliedSteps::default();
    for (step, coefficient) in [(1, 1.0), (2, 0.3), (3, -0.0), (4, 1e-3)] {
        let mut optimizer = *optimizer;
        optimizer.set_lr(optimizer.lr().unwrap_or_default() / step as f64);
        let at = Position { tensor: 5, element: step * (1 << 22) };
        let update = Update { at, ..Update::after(applied, &optimizer, coefficient) };
        applied = update.applied();
        let values = numbers(20 + step as usize, numel);
        let gradient = buffer_of(backend, &values, DType::F32);
        let mut published = published_as.map(|dtype| backend.allocate(dtype, numel).unwrap());
        // A reader holds the earlier values of every other step.
        let held = step % 2 == 0;
        let mut outputs: Vec<_> = arrays.into_iter().map(|of| next(backend, of, held)).collect();
        // The new values may take the place of the gradient.
        let gradient = match step == 4 && crate::reads_gradient_once(&optimizer) {
            true => {
                outputs[0].0 = gradient;
                None
            }
            false => Some(gradient),
        };
        let [master, state @ ..] = &mut outputs[..] else { unreachable!("there is a master") };
        let state = state.iter_mut().map(output).collect();
        let (master, published_to) = (output(master), published.as_mut());
        let (mut seen, gradient) = (Seen::default(), gradient.as_ref());
        let record = Some(&mut seen as &mut dyn Record);
        backend.apply(&update, master, state, gradient, published_to, record).unwrap();
        let mut before = vec![expected.clone()];
        before.extend(expected_state.iter().cloned());
        reference::apply(&update, state_dtype, &mut expected, &mut expected_state, &values);
        for ((position, values), &code) in (0..).zip(&mut expected_state).zip(state_codes) {
            *values = codes::stepped(code, values, &update, position);
        }

        if backend.device() == DeviceName::Cpu {
            seen.assert_is(&before[0], &expected);
        }
        let what = format!("{optimizer:?}, {state_dtype} state, shape {shape:?}, step {step}");
        let names = ["master"].into_iter().chain(optimizer.state().iter().copied());
        let after = [&expected].into_iter().chain(&expected_state);
        arrays = Vec::new();
        for (((name, expected), (buffer, held)), before) in
            names.zip(after).zip(outputs).zip(&before)
        {
            arrays.push(assert_contents(backend, buffer, expected, &format!("{name} of {what}")));
            if let Some(held) = held {
                let held = Arc::into_inner(held).expect("the step has ended");
                assert_contents(backend, held, before, &format!("held {name} of {what}"));
            }
        }
        if let Some(published) = published {
            let dtype = backend.dtype(&published);
            let expected = from_bytes(&to_bytes(&expected, dtype), dtype);
            assert_contents(backend, published, &expected, &format!("{dtype} of {what}"));
        }
    }
}

/// The buffer for the next values of `buffer` and, if a reader holds it, `buffer` itself. The
/// former has other values then.
fn next<B: Backend>(
    backend: &B,
    buffer: B::Buffer,
    is_held: bool,
) -> (B::Buffer, Option<Arc<B::Buffer>>) {
    match is_held {
        true => {
            let numel = backend.numel(&buffer);
            let mut other = backend.another(&buffer).unwrap();
            let values = to_bytes(&numbers(30, numel), DType::F32);
            backend.store(&mut other, 0..numel, &values, DType::F32).unwrap();
            (other, Some(Arc::new(buffer)))
        }
        false => (buffer, None),
    }
}

fn output<T>((buffer, earlier): &mut (T, Option<Arc<T>>)) -> Output<'_, T> {
    Output { buffer, earlier: earlier.clone() }
}

/// LAMB changes tensors that are zero, and leaves tensors without an update unchanged.
fn a_zero_norm_is_trusted<B: Backend>(backend: &B) {
    let optimizer: Optimizer = "lamb".parse().unwrap();
    let update = Update::after(AppliedSteps::default(), &optimizer, 1.0);
    for (parameter, gradient) in [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)] {
        let mut expected = vec![parameter; 5];
        let mut expected_state = vec![vec![0.0; 5]; 2];
        let mut master = buffer_of(backend, &expected, DType::F32);
        let mut moments = [(); 2].map(|()| backend.allocate(DType::F32, 5).unwrap());
        let gradient = vec![gradient; 5];
        let gradients = buffer_of(backend, &gradient, DType::F32);
        let moments = moments.iter_mut().map(Into::into).collect();
        backend
            .apply(&update, (&mut master).into(), moments, Some(&gradients), None, None)
            .unwrap();
        reference::apply(&update, F32, &mut expected, &mut expected_state, &gradient);
        assert!(expected.iter().all(|value| value.is_finite()));
        assert_contents(backend, master, &expected, "LAMB with a zero norm");
    }
}

fn assert_contents<B: Backend>(
    backend: &B,
    buffer: B::Buffer,
    expected: &[f32],
    what: &str,
) -> B::Buffer {
    let dtype = backend.dtype(&buffer);
    let (bytes, buffer) = contents(backend, buffer);
    assert_same(&from_bytes(&bytes, dtype), expected, what);
    buffer
}
