-- sweep: which leases have run out, and which entries were read but never begun. Changes no job.
-- A gap since the last sweep longer than half a lease, or a clock that went back, means that renewals may have been
-- impossible: then nothing expires for a full lease.
-- Consumers that hold nothing and have not read for two leases belong to ranks that are gone, and go too.
-- KEY sweep hash
-- KEY leases zset
-- KEY queue stream
-- ARG lease ms
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"hold"} | {"ok", {token ...}, {entry ...}}
local at_ms = now_ms()
local seen = redis.call('HMGET', sweep, 'last_ms', 'hold_until_ms')
local gap_ms = seen[1] and at_ms - tonumber(seen[1])
local hold_until_ms = tonumber(seen[2] or 0)
if not gap_ms or gap_ms < 0 or gap_ms > lease / 2 then hold_until_ms = at_ms + lease end
redis.call('HSET', sweep, 'last_ms', at_ms, 'hold_until_ms', hold_until_ms)
if hold_until_ms > at_ms then return {'hold'} end
local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', at_ms, 'LIMIT', 0, 100)
local unbegun = {}
if redis.call('EXISTS', queue) == 1 then
  local pending = redis.pcall('XPENDING', queue, 'workers', 'IDLE', lease, '-', '+', 100)
  if not pending.err then
    for i, item in ipairs(pending) do unbegun[i] = item[1] end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', queue, 'workers')) do
      local _, name, _, held, _, idle_ms = unpack(consumer)
      if held == 0 and idle_ms > 2 * lease then redis.call('XGROUP', 'DELCONSUMER', queue, 'workers', name) end
    end
  end
end
return {'ok', expired, unbegun}
