package target

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"mailproof/history"
)

// requestTimeout of one request; an answer that takes longer is unknown.
const requestTimeout = 10 * time.Second

// client speaks to bookingd as its customers' front end would.
//
// It keeps to one process until that does not answer, as a load balancer's
// health check would have it.
type client struct {
	http *http.Client
	to   []*program
	turn atomic.Uint64 // rises each time a process did not answer
}

func newClient(to []*program) *client {
	return &client{to: to, http: &http.Client{
		Timeout:   requestTimeout,
		Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Minute},
	}}
}

// answer of one request: what is known of it, and why no more.
type answer struct {
	outcome history.OpOutcome
	err     error
}

func done() answer                          { return answer{outcome: history.OpOK} }
func failed(format string, a ...any) answer { return answer{history.OpFail, fmt.Errorf(format, a...)} }

func unknown(format string, a ...any) answer {
	return answer{history.OpUnknown, fmt.Errorf(format, a...)}
}

// post sends one request and says truthfully what became of it.
func (c *client) post(ctx context.Context, path string, body any) answer {
	turn := c.turn.Load()
	addr := c.pick(turn)
	if addr == "" {
		return failed("no booking process listens")
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return failed("%w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(raw))
	if err != nil {
		return failed("%w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		c.turn.CompareAndSwap(turn, turn+1) // once for all requests that met the same silence
		if neverSent(err) {
			return failed("%w", err)
		}
		return unknown("%w", err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	return judge(resp)
}

// pick is the process whose turn it is, or the next one that listens.
func (c *client) pick(turn uint64) string {
	for i := range c.to {
		if addr := c.to[(int(turn)+i)%len(c.to)].addr(); addr != "" {
			return addr
		}
	}
	return ""
}

// neverSent reports an error that came before the first byte left.
func neverSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// judge reads what the answer says. A status of success counts even when the
// body is lost; a failure counts as one only if the service itself said so.
func judge(resp *http.Response) answer {
	const maxAnswer = 64 << 10
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if resp.StatusCode < 300 {
		return done()
	}
	var body struct {
		Error struct{ Code, Message string }
	}
	if err == nil {
		err = json.Unmarshal(raw, &body)
	}
	code := body.Error.Code
	if err != nil || code == "" || code == "unknown" {
		return unknown("%s: %s", resp.Status, raw)
	}
	return failed("%s: %s: %s", resp.Status, code, body.Error.Message)
}
