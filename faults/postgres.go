package faults

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"mailproof/faults/pgproxy"
)

// lossBound bounds the wait for the statements whose answers shall be lost.
const lossBound = time.Minute

// AnswerLost loses answers of statements that the server has committed: the
// order is one of [pgproxy].
func AnswerLost(title string, proxy *pgproxy.Proxy, order pgproxy.Order) Act {
	return Act{
		Title: title, Part: "answers of Postgres",
		Strike: func(ctx context.Context) (Witness, error) {
			ctx, cancel := context.WithTimeout(ctx, lossBound)
			defer cancel()
			loss := proxy.LoseAnswers(order)
			defer proxy.Cancel(loss)
			if err := loss.Await(ctx); err != nil {
				return Witness{}, err
			}
			n, tags := loss.Lost()
			return Witness{
				Text: fmt.Sprintf("%d times the server had answered %s and was outside of a transaction; the connection was cut before the client heard it",
					n, strings.Join(slices.Sorted(maps.Keys(tags)), ", ")),
				Count: n,
			}, nil
		},
	}
}

// ConnectionsReset cuts every connection to Postgres, rounds times with a pause
// between.
func ConnectionsReset(proxy *pgproxy.Proxy, rounds int, pause time.Duration) Act {
	return Act{
		Title: "postgres-connections-reset", Part: "connections to Postgres",
		Strike: func(ctx context.Context) (Witness, error) {
			n := 0
			for range rounds {
				n += proxy.Reset()
				if !sleep(ctx, pause) {
					return Witness{}, ctx.Err()
				}
			}
			if n == 0 {
				return Witness{}, nil
			}
			return Witness{Text: fmt.Sprintf("%d connections were cut in %d rounds", n, rounds), Count: n}, nil
		},
	}
}

// DatabaseStalled lets nothing through between the system and Postgres, in
// either direction, for lasts; connections stay open.
func DatabaseStalled(proxy *pgproxy.Proxy, lasts time.Duration) Act {
	return Act{
		Title: "postgres-stalled", Part: "connections to Postgres",
		Mend: func(context.Context) error { proxy.Stall(false); return nil },
		Strike: func(ctx context.Context) (Witness, error) {
			before := proxy.Stalled()
			proxy.Stall(true)
			ok := sleep(ctx, lasts)
			n := proxy.Stalled() - before
			proxy.Stall(false)
			if !ok {
				return Witness{}, ctx.Err()
			}
			if n == 0 {
				return Witness{}, nil
			}
			return Witness{Text: fmt.Sprintf("%d messages between the system and Postgres waited, for up to %.1f s", n, lasts.Seconds()), Count: n}, nil
		},
	}
}
