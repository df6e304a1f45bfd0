package notify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/notify/config"
)

// newSender makes the senders of one lane: one connection with an EHLO name, or
// a User-Agent, of its own per worker, so that the mail server's log names who
// held a session.
func newSender(cfg config.Config, t contract.MailType, workers int) (mail.EmailSender, error) {
	s := &senders{free: make(chan mail.EmailSender, workers)}
	for i := range workers {
		one, err := transport(cfg, fmt.Sprintf("notifyd-%s.%s-%d", cfg.Instance, t.Lane(), i+1))
		if err != nil {
			return nil, err
		}
		s.all = append(s.all, one)
		s.free <- one
	}
	return s, nil
}

func transport(cfg config.Config, name string) (mail.EmailSender, error) {
	if cfg.Transport == "resend" {
		return mail.NewResendSender(mail.ResendConfig{
			URL: cfg.ResendURL, APIKey: cfg.ResendAPIKey, UserAgent: name, Connections: 1, SendTimeout: cfg.SendDeadline,
			ConnectTimeout: min(mail.DefaultConnectTimeout, cfg.SendDeadline),
		})
	}
	return mail.NewSMTPSender(smtpConfig(cfg, name))
}

func smtpConfig(cfg config.Config, name string) mail.SMTPConfig {
	c := mail.SMTPConfig{
		Addr: cfg.SMTPAddr, Name: name, Username: cfg.SMTPUser, Password: cfg.SMTPPassword,
		Connections: 1, SendTimeout: cfg.SendDeadline,
		ConnectTimeout: min(mail.DefaultConnectTimeout, cfg.SendDeadline),
		CommandTimeout: min(mail.DefaultCommandTimeout, cfg.SendDeadline),
	}
	if cfg.SMTPStartTLS {
		c.TLS = mail.TLSStartTLS
	}
	return c
}

// senders lends each of its senders to one mail at a time.
type senders struct {
	free chan mail.EmailSender
	all  []mail.EmailSender
}

// Send tries once with a free sender. There are as many as workers, so none
// waits for long.
func (s *senders) Send(ctx context.Context, m mail.Message, beforeCommit func() error) (string, error) {
	select {
	case one := <-s.free:
		defer func() { s.free <- one }()
		return one.Send(ctx, m, beforeCommit)
	case <-ctx.Done():
		return "", &mail.TransientError{Failure: mail.Failure{Stage: mail.StageConnect, Err: ctx.Err()}}
	}
}

// Close ends the kept connections.
func (s *senders) Close() error {
	var failed error
	for _, one := range s.all {
		failed = errors.Join(failed, one.Close())
	}
	return failed
}

// renderer makes a mail's bytes from its row. The date is that of the first
// claim, so that a second rendering of a row whose bytes were not stored in
// time gives the same mail.
func renderer(cfg config.Config) (func(delivery.Row) ([]byte, error), error) {
	r, err := mail.NewRenderer(mail.RendererConfig{From: cfg.MailFrom, UnsubscribeURL: cfg.UnsubscribeURL})
	if err != nil {
		return nil, err
	}
	render := r.Render
	if cfg.Transport == "resend" {
		render = r.RenderResend
	}
	return func(row delivery.Row) ([]byte, error) {
		in, err := renderingOf(row)
		if err != nil {
			return nil, fmt.Errorf("payload of %s: %w", row.DedupeKey, err)
		}
		m, err := render(in)
		return m.Bytes, err
	}, nil
}

// renderingOf reads a row's payload, which is its type's own.
func renderingOf(row delivery.Row) (mail.Rendering, error) {
	in := mail.Rendering{
		Template: contract.TemplateTicketConfirmed, DedupeKey: row.DedupeKey, BookingID: row.BookingID, To: row.Recipient, Date: row.CreatedAt,
	}
	if row.FirstClaimedAt != nil {
		in.Date = *row.FirstClaimedAt
	}
	if row.Type != contract.Marketing {
		return in, json.Unmarshal(row.Payload, &in.Data)
	}
	m, err := contract.DecodeCampaignMail(row.Payload)
	in.Template, in.Campaign = m.Template, m.Data
	return in, err
}
