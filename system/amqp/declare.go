package amqp

import amqp091 "github.com/rabbitmq/amqp091-go"

// Declarer is what topology needs of a channel.
type Declarer interface {
	ExchangeDeclare(name, kind string, durable, autoDelete, internal, noWait bool, args amqp091.Table) error
	QueueDeclare(name string, durable, autoDelete, exclusive, noWait bool, args amqp091.Table) (amqp091.Queue, error)
	QueueBind(name, key, exchange string, noWait bool, args amqp091.Table) error
}

var _ Declarer = (*amqp091.Channel)(nil)
