package notify

import (
	"errors"
	"log/slog"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/notify/config"
)

var errNoSender = errors.New("system/mail has no sender yet")

func newSender(cfg config.Config, t contract.MailType, workers int, log *slog.Logger) (mail.EmailSender, error) {
	return nil, errNoSender
}

func renderer(cfg config.Config) func(delivery.Row) ([]byte, error) {
	return func(delivery.Row) ([]byte, error) { return nil, errNoSender }
}
