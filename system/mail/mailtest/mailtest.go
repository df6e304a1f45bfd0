// Package mailtest is the suite that every [mail.EmailSender] has to pass: what
// a sender says of a mail must be what became of it, however the server behaves.
//
// A sender brings a [Provider]: a server that misbehaves on command and knows
// what it has stored. The suite has no opinion about protocols.
//
// Package mailtest imports nothing of the system but mail.
package mailtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"mailproof/system/mail"
)

// Behaviour of a server towards the mails that follow.
type Behaviour string

// The behaviours. Those that lose the answer store the mail first.
const (
	Accept          Behaviour = "accept"
	RefuseForNow    Behaviour = "refuse for now"   // not stored, come again
	RefuseForGood   Behaviour = "refuse for good"  // not stored, never will be
	RefuseClient    Behaviour = "refuse client"    // before any mail is named
	DropBefore      Behaviour = "drop before"      // the connection ends before the commit
	HangBefore      Behaviour = "hang before"      // no answer before the commit
	StoreThenDrop   Behaviour = "store then drop"  // closed in order, without an answer
	StoreThenReset  Behaviour = "store then reset" // reset
	StoreThenHang   Behaviour = "store then hang"  // open, and silent
	StoreThenNoise  Behaviour = "store then noise" // bytes that are no answer
	StoreThenHalf   Behaviour = "store then half"  // half an answer, then closed
	AcceptThenClose Behaviour = "accept then close"
)

// Provider is the server of one sender under test.
type Provider interface {
	// Sender makes a sender of this provider with a hard limit per Send. The
	// suite closes it.
	Sender(t *testing.T, limit time.Duration) mail.EmailSender
	// Behave changes how the server treats what comes from now on.
	Behave(t *testing.T, b Behaviour)
	// Copies is how many copies of a key's mail are stored.
	Copies(key string) int
	// Hash is the SHA-256, in hex, of the latest stored mail of a key as the
	// server received it; "" if it does not see the mail's bytes.
	Hash(key string) string
}

// Quieter is a [Provider] of a protocol in which the server says nothing before
// the commit (HTTP): a sender cannot notice the end of a kept connection that is
// still on its way. Quiet waits until the server has done what it does after an
// answer.
type Quieter interface{ Quiet(t *testing.T) }

func quiet(t *testing.T, p Provider) {
	t.Helper()
	if q, ok := p.(Quieter); ok {
		q.Quiet(t)
	}
}

// Suite of one sender.
type Suite struct {
	New func(t *testing.T) Provider
	// Mail makes a mail of a key, to be sent by the sender. Nil makes RFC 5322
	// with the key in X-Dedupe-Key.
	Mail func(key string) mail.Message
	// Longer puts a text at the end of a mail's contents, whatever holds them.
	// Nil appends it to the bytes.
	Longer func(m mail.Message, tail string) mail.Message
}

// limit of a Send where the server hangs; slack is what a loaded machine may add.
const (
	limit = 2 * time.Second
	slack = 5 * time.Second
	calm  = 30 * time.Second // where nothing is expected to take long
)

// Run runs the suite.
func Run(t *testing.T, s Suite) {
	if s.Mail == nil {
		s.Mail = Mail
	}
	if s.Longer == nil {
		s.Longer = func(m mail.Message, tail string) mail.Message {
			m.Bytes = append(m.Bytes, tail...)
			return m
		}
	}
	t.Run("accepted", s.accepted)
	t.Run("refusals", s.refusals)
	t.Run("lost answers are ambiguous", s.lostAnswers)
	t.Run("before the commit nothing is ambiguous", s.beforeCommit)
	t.Run("the caller can stop it before the commit", s.stopped)
	t.Run("too late before the commit", s.tooLate)
	t.Run("a cancelled context", s.cancelled)
	t.Run("the bytes arrive unchanged", s.bytes)
	t.Run("kept connections that died", s.keptDead)
	t.Run("side by side", s.sideBySide)
	t.Run("closed", s.closed)
	t.Run("malformed address", s.malformed)
}

// Mail is a mail of a key to one recipient.
func Mail(key string) mail.Message {
	return mail.Message{
		From: "tickets@example.org", To: "bob@example.com", IdempotencyKey: key,
		Bytes: []byte(strings.Join([]string{
			"From: tickets@example.org", "To: bob@example.com", "Subject: ticket",
			"Message-ID: <" + key + "@example.org>", "X-Dedupe-Key: " + key, "", "Your ticket.", "",
		}, "\r\n")),
	}
}

func (s Suite) start(t *testing.T, d time.Duration) (Provider, mail.EmailSender) {
	t.Helper()
	p := s.New(t)
	sender := p.Sender(t, d)
	t.Cleanup(func() { require.NoError(t, sender.Close()) })
	return p, sender
}

// yes is a beforeCommit that allows it and counts.
type yes struct{ calls int }

func (y *yes) ask() error { y.calls++; return nil }

func (s Suite) accepted(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	ids := map[string]bool{}
	for i := range 3 {
		key := fmt.Sprint("accepted-", i)
		var y yes
		id, err := sender.Send(t.Context(), s.Mail(key), func() error {
			assert.Zero(t, p.Copies(key), "asked before the server has the mail")
			return y.ask()
		})
		require.NoError(t, err)
		require.NotEmpty(t, id)
		ids[id] = true
		require.Equal(t, 1, y.calls)
		require.Equal(t, 1, p.Copies(key))
	}
	require.Len(t, ids, 3, "each mail has an id of its own")
}

func (s Suite) refusals(t *testing.T) {
	t.Parallel()
	for b, check := range map[Behaviour]func(*testing.T, error){
		RefuseForNow:  isTransient,
		RefuseForGood: isPermanent,
		RefuseClient: func(t *testing.T, err error) {
			_, ok := errors.AsType[*mail.LaneError](err)
			require.True(t, ok, "%v", err)
		},
	} {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			p, sender := s.start(t, calm)
			p.Behave(t, b)
			_, err := sender.Send(t.Context(), s.Mail("refused"), nil)
			check(t, err)
			require.Zero(t, p.Copies("refused"))
			p.Behave(t, Accept)
			_, err = sender.Send(t.Context(), s.Mail("next"), nil)
			require.NoError(t, err, "one refusal does not spoil the sender")
		})
	}
}

func isTransient(t *testing.T, err error) {
	t.Helper()
	_, ok := errors.AsType[*mail.TransientError](err)
	require.True(t, ok, "%T %v", err, err)
}

func isPermanent(t *testing.T, err error) {
	t.Helper()
	_, ok := errors.AsType[*mail.PermanentError](err)
	require.True(t, ok, "%T %v", err, err)
}

func isAmbiguous(t *testing.T, err error) {
	t.Helper()
	_, ok := errors.AsType[*mail.AmbiguousError](err)
	require.True(t, ok, "%T %v", err, err)
}

// OB-01, and the policy for it needs to be told.
func (s Suite) lostAnswers(t *testing.T) {
	t.Parallel()
	for _, b := range []Behaviour{StoreThenDrop, StoreThenReset, StoreThenHang, StoreThenNoise, StoreThenHalf} {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			p, sender := s.start(t, limit)
			p.Behave(t, b)
			var y yes
			began := time.Now()
			_, err := sender.Send(t.Context(), s.Mail("lost"), y.ask)
			isAmbiguous(t, err)
			require.Less(t, time.Since(began), limit+slack, "the hard limit holds (OB-02)")
			require.Equal(t, 1, y.calls, "not sent a second time in the same try")
			require.Equal(t, 1, p.Copies("lost"))
		})
	}
	t.Run(string(AcceptThenClose), func(t *testing.T) {
		t.Parallel()
		p, sender := s.start(t, calm)
		p.Behave(t, AcceptThenClose)
		for i := range 3 {
			_, err := sender.Send(t.Context(), s.Mail(fmt.Sprint("closing-", i)), nil)
			require.NoError(t, err, "what happens after the answer changes nothing")
			quiet(t, p)
		}
	})
}

func (s Suite) beforeCommit(t *testing.T) {
	t.Parallel()
	for _, b := range []Behaviour{DropBefore, HangBefore} {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			p, sender := s.start(t, limit)
			p.Behave(t, b)
			var y yes
			began := time.Now()
			_, err := sender.Send(t.Context(), s.Mail("early"), y.ask)
			isTransient(t, err)
			require.Less(t, time.Since(began), limit+slack)
			require.Zero(t, y.calls)
			require.Zero(t, p.Copies("early"))
		})
	}
}

func (s Suite) stopped(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	lease := errors.New("the lease is over")
	for range 3 {
		_, err := sender.Send(t.Context(), s.Mail("stopped"), func() error { return lease })
		isTransient(t, err)
		require.ErrorIs(t, err, lease)
	}
	_, err := sender.Send(t.Context(), s.Mail("after"), nil)
	require.NoError(t, err)
	require.Equal(t, 1, p.Copies("after"))
	require.Zero(t, p.Copies("stopped"))
}

// A process that was stopped and woke up: the caller agrees, but the limit of
// the send has passed meanwhile.
func (s Suite) tooLate(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, limit)
	p.Behave(t, Accept)
	_, err := sender.Send(t.Context(), s.Mail("woken"), func() error {
		time.Sleep(limit + 50*time.Millisecond) // stands for the stop
		return nil
	})
	isTransient(t, err)
	_, err = sender.Send(t.Context(), s.Mail("after"), nil)
	require.NoError(t, err)
	require.Zero(t, p.Copies("woken"))
}

func (s Suite) cancelled(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := sender.Send(ctx, s.Mail("cancelled"), nil)
	isTransient(t, err)

	p.Behave(t, StoreThenHang)
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	_, err = sender.Send(ctx, s.Mail("cancelled-late"), nil)
	require.Error(t, err)
	require.Less(t, time.Since(began), slack)
	require.Zero(t, p.Copies("cancelled"))
}

func (s Suite) bytes(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	for name, tail := range map[string]string{
		"dots":       "\r\n.\r\n..\r\n.a\r\n...b\r\n",
		"ends-plain": "no line end",
		"large":      strings.Repeat(strings.Repeat("x", 70)+"\r\n.\r\n", 20_000),
	} {
		if name == "ends-plain" {
			tail += "\r\n" // DATA always ends a line
		}
		m := s.Longer(s.Mail("bytes-"+name), tail)
		_, err := sender.Send(t.Context(), m, nil)
		require.NoError(t, err, name)
		sum := sha256.Sum256(m.Bytes)
		if got := p.Hash("bytes-" + name); got != "" {
			require.Equal(t, hex.EncodeToString(sum[:]), got, name)
		}
	}
}

func (s Suite) keptDead(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, AcceptThenClose)
	_, err := sender.Send(t.Context(), s.Mail("first"), nil)
	require.NoError(t, err)
	quiet(t, p)
	p.Behave(t, Accept)
	var y yes
	_, err = sender.Send(t.Context(), s.Mail("second"), y.ask)
	require.NoError(t, err, "a dead connection costs no try")
	require.Equal(t, 1, y.calls)
	require.Equal(t, 1, p.Copies("second"))
}

func (s Suite) sideBySide(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				_, err := sender.Send(t.Context(), s.Mail(fmt.Sprintf("side-%d-%d", w, i)), nil)
				assert.NoError(t, err)
			}
		})
	}
	wg.Wait()
	for w := range 8 {
		for i := range 20 {
			require.Equal(t, 1, p.Copies(fmt.Sprintf("side-%d-%d", w, i)))
		}
	}
}

func (s Suite) closed(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	_, err := sender.Send(t.Context(), s.Mail("open"), nil)
	require.NoError(t, err)
	require.NoError(t, sender.Close())
	require.NoError(t, sender.Close(), "twice is fine")
	_, err = sender.Send(t.Context(), s.Mail("closed"), nil)
	isTransient(t, err)
	require.Zero(t, p.Copies("closed"))
}

// AC5.
func (s Suite) malformed(t *testing.T) {
	t.Parallel()
	p, sender := s.start(t, calm)
	p.Behave(t, Accept)
	for _, to := range []string{"", "nobody", "a b@example.org", "a@", "@b", "a@b\r\nRCPT TO:<evil@example.org>", "a@b>\r\nX: y"} {
		m := s.Mail("malformed")
		m.To = to
		_, err := sender.Send(t.Context(), m, nil)
		isPermanent(t, err)
	}
	require.Zero(t, p.Copies("malformed"))
}
