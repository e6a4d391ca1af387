//! Tests the upload of initial parameters.

use super::*;

/// A sharded linear layer, and a large replicated tensor, which only the first rank uploads.
#[derive(Module, Debug)]
struct Large<B: Backend> {
    sharded: ParallelLinear<B>,
    replicated: Param<Tensor<B, 1>>,
}

impl<B: ParallelBackend> Parallelize<B> for Large<B> {
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
        vec![("sharded".into(), (&mut self.sharded).into())]
    }
}

#[test]
fn the_upload_of_a_rank_that_leaves_at_once_is_kept() {
    with_cluster(1, |world, settings, runtime| {
        let mesh = line(&world, 2);
        let mut module = Large::<Graph> {
            sharded: linear(1, 4, 4),
            replicated: Param::from_tensor(
                Tensor::ones([1 << 22], &Default::default()).require_grad(),
            ),
        };
        let mut layer = Layer::from(&mut module.sharded);
        layer.shard("weight", &mesh, &[Shard(1)]).unwrap();
        let optimizer = shard_optimizer(&mut module, &mesh, settings, runtime).unwrap();
        // The second rank has uploaded its columns long before the first one has uploaded the rest.
        if world.rank() == 1 {
            return optimizer.leave().unwrap();
        }
        let pulled = optimizer.pull(module).unwrap();
        assert_eq!(values(pulled.sharded.weight.val()).len(), 8);
        optimizer.leave().unwrap();
    });
}
