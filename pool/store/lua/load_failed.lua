-- load_failed: a rank could not load its model. Where that load was asked for, and no other rank may still carry it out,
-- the model takes no jobs.
-- KEY model hash
-- KEY ranks zset
-- KEYS records hash of the ranks in `ids`
-- ARG change str that the rank has tried
-- ARG rank str
-- ARG error str
-- ARG ids list
-- INCLUDE clock present
-- FLAGS allow-oom
-- RETURN {"failed"}: the model has | {"noted"} | {"ranks"}: there are others, to be declared
local at_ms = now_ms()
local seen = redis.call('HMGET', model, 'wanted', 'change', 'done')
local is_asked = seen[1] == 'loaded' and seen[2] == change and seen[3] ~= change
local other = is_asked and unlike(ranks, ids, records, {failed = 1}, at_ms)
if other and other[1] == 'ranks' then return other end
redis.call('HSET', model, 'last_error', error, 'error_rank', rank, 'error_ms', at_ms)
if not is_asked or other then return {'noted'} end
redis.call('HSET', model, 'failed', 1)
return {'failed'}
