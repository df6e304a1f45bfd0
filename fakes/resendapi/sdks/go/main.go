// Command go makes calls with Resend's official SDK for Go: one JSON object a
// line in, what the SDK returned out. The test in ../.. drives it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"

	"github.com/resend/resend-go/v3"
)

type call struct {
	Base       string          `json:"base"`
	APIKey     string          `json:"api_key"`
	Call       string          `json:"call"`
	ID         string          `json:"id"`
	Key        string          `json:"key"`
	Validation string          `json:"validation"`
	Args       json.RawMessage `json:"args"`
}

type result struct {
	Data  any    `json:"data,omitempty"`
	Error *fault `json:"error,omitempty"`
}

type fault struct {
	Message    string `json:"message"`
	RateLimit  bool   `json:"rate_limit,omitempty"`
	RetryAfter string `json:"retry_after,omitempty"`
	Limit      string `json:"limit,omitempty"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 64<<20)
	out := json.NewEncoder(os.Stdout)
	for in.Scan() {
		var c call
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			return err
		}
		data, err := c.make()
		r := result{Data: data}
		if err != nil {
			r = result{Error: &fault{Message: err.Error()}}
			var limit *resend.RateLimitError
			if errors.As(err, &limit) {
				r.Error.RateLimit, r.Error.RetryAfter, r.Error.Limit = true, limit.RetryAfter, limit.Limit
			}
		}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
	return in.Err()
}

func (c call) make() (any, error) {
	base, err := url.Parse(c.Base + "/")
	if err != nil {
		return nil, err
	}
	client := resend.NewClient(c.APIKey)
	client.BaseURL = base
	ctx := context.Background()
	var args struct {
		Limit *int    `json:"limit"`
		After *string `json:"after"`
	}
	switch c.Call {
	case "emails.list", "webhooks.list":
		if err := json.Unmarshal(c.Args, &args); err != nil {
			return nil, err
		}
	}
	page := &resend.ListOptions{Limit: args.Limit, After: args.After}
	switch c.Call {
	case "emails.send":
		var m resend.SendEmailRequest
		if err := json.Unmarshal(c.Args, &m); err != nil {
			return nil, err
		}
		return client.Emails.SendWithOptions(ctx, &m, &resend.SendEmailOptions{IdempotencyKey: c.Key})
	case "batch.send":
		var mails []*resend.SendEmailRequest
		if err := json.Unmarshal(c.Args, &mails); err != nil {
			return nil, err
		}
		return client.Batch.SendWithOptions(ctx, mails, &resend.BatchSendEmailOptions{
			IdempotencyKey: c.Key, BatchValidation: resend.BatchValidationMode(c.Validation),
		})
	case "emails.get":
		return client.Emails.Get(c.ID)
	case "emails.list":
		return client.Emails.ListWithOptions(ctx, page)
	case "emails.update":
		m := resend.UpdateEmailRequest{}
		if err := json.Unmarshal(c.Args, &m); err != nil {
			return nil, err
		}
		m.Id = c.ID
		return client.Emails.Update(&m)
	case "emails.cancel":
		return client.Emails.Cancel(c.ID)
	case "webhooks.create":
		var w resend.CreateWebhookRequest
		if err := json.Unmarshal(c.Args, &w); err != nil {
			return nil, err
		}
		return client.Webhooks.Create(&w)
	case "webhooks.get":
		return client.Webhooks.Get(c.ID)
	case "webhooks.list":
		return client.Webhooks.ListWithOptions(ctx, page)
	case "webhooks.update":
		var w resend.UpdateWebhookRequest
		if err := json.Unmarshal(c.Args, &w); err != nil {
			return nil, err
		}
		return client.Webhooks.Update(c.ID, &w)
	case "webhooks.remove":
		return client.Webhooks.Remove(c.ID)
	case "webhooks.verify":
		var v struct{ Payload, ID, Timestamp, Signature, Secret string }
		if err := json.Unmarshal(c.Args, &v); err != nil {
			return nil, err
		}
		return map[string]bool{"verified": true}, client.Webhooks.Verify(&resend.VerifyWebhookOptions{
			Payload: v.Payload, WebhookSecret: v.Secret,
			Headers: resend.WebhookHeaders{Id: v.ID, Timestamp: v.Timestamp, Signature: v.Signature},
		})
	}
	return nil, fmt.Errorf("unknown call %q", c.Call)
}
