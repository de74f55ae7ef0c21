-- unloaded: an unload is over, once no job is left and no rank holds the model. Then it is loaded again where that was
-- asked for meanwhile.
-- KEY model hash
-- KEY index zset
-- KEY ranks zset
-- KEYS records hash of the ranks in `ids`
-- ARG ids list
-- INCLUDE clock present
-- FLAGS allow-oom
-- RETURN {"ok", unloaded | loaded: what is wanted now} | {"busy", rank, or "" for jobs} | {"kept"} it is not being unloaded
--   | {"ranks"}: there are others, to be declared
local at_ms = now_ms()
local seen = redis.call('HMGET', model, 'phase', 'next', 'change')
if seen[1] ~= 'unloading' then return {'kept'} end
if redis.call('EXISTS', index) == 1 then return {'busy', ''} end
local busy = unlike(ranks, ids, records, {unloaded = 1, failed = 1, waiting = 1}, at_ms)
if busy then return busy end
redis.call('HDEL', model, 'phase', 'until_ms', 'next', 'last_error', 'error_rank', 'error_ms')
if seen[2] then
  redis.call('HSET', model, 'wanted', 'loaded', 'change', seen[3] + 1, 'since_ms', at_ms)
  return {'ok', 'loaded'}
end
redis.call('HSET', model, 'phase', 'unloaded', 'since_ms', at_ms)
return {'ok', 'unloaded'}
