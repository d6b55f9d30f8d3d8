"""What a client does: train on its own pictures, and measure how good the model is."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from photoapp.task import Net, load_data, load_test_data, test, train

app = ClientApp()


@app.train()
def train_on_own_pictures(msg: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    config = context.run_config
    trainloader = load_data(
        int(context.node_config["partition-id"]),
        msg.content["config"]["server-round"],
        config["pictures-per-round"],
        config["batch-size"],
    )
    loss = train(net, trainloader, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    testloader = load_test_data()
    loss, accuracy = test(net, testloader)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
